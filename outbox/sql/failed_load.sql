-- What waits outside the log of $2 lanes: the head of each key, each event without a key, and how many stand there in all.
-- Dead ones stand in nobody's way when they have no key, nor when $3 says to skip them.
select distinct on (f.lane, f.key, f.alone)
       f.lane, f.key, f.seq, f.attempt, f.state = 'dead' as dead,
       coalesce(extract(epoch from f.due_at - clock_timestamp()), 0)::float8 as wait,
       count(*) over (partition by f.lane, f.key, f.alone)::integer as rows
from (select x.*, case when x.key is null then x.seq end as alone from {schema}.failed x
      where x.subscription = $1::text and x.lane = any ($2::smallint[])
        and not (x.state = 'dead' and (x.key is null or $3::boolean))) f
order by f.lane, f.key, f.alone, f.seq
