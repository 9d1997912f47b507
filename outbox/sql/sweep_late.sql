-- Once a day, what committed below the mark after it had passed.
with mark as materialized (
  update {schema}.swept s set late_at = clock_timestamp()
  where s.lane = $1::smallint and s.late_at < clock_timestamp() - interval '1 day'
  returning s.seq
), late as materialized (
  select e.seq from mark
  cross join lateral (
    select e.seq, e.xid, e.published_at from {schema}.event e where e.lane = $1::smallint and e.seq <= mark.seq order by e.seq limit 10000) e
  where e.published_at < clock_timestamp() - $2::interval
    and not exists (
      select 1 from {schema}.subscription s
      cross join lateral (
        select c.from_tick from {schema}.cursor c where c.subscription = s.name and c.lane = $1::smallint order by c.n desc limit 1) c
      cross join lateral (
        select t.snapshot from {schema}.tick t where t.id <= c.from_tick order by t.id desc limit 1) t  -- its own, else see cursor_adopt.sql
      where not pg_visible_in_snapshot(e.xid, t.snapshot))
)
delete from {schema}.event e using late where e.lane = $1::smallint and e.seq = late.seq
