-- Adds the row that makes a bumped token count, and returns how many lanes still lack it because their owner added a row at the
-- same moment. $2 null leaves positions as they are; else lanes go to the end of that tick, from the base tick as in
-- subscription_create.sql.
with newest as materialized (
  select l.lane, l.token as lease_token, c.n, c.from_tick, c.to_tick, c.pos, c.token
  from {schema}.lease l
  cross join lateral (
    select c.n, c.from_tick, c.to_tick, c.pos, c.token from {schema}.cursor c
    where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
  where l.subscription = $1::text and c.token < l.token
), added as (
  insert into {schema}.cursor (subscription, lane, n, from_tick, to_tick, pos, token)
  select $1::text, w.lane, w.n + 1, coalesce($2::bigint, w.from_tick), case when $2::bigint is null then w.to_tick end,
         case when $2::bigint is null then w.pos when $2::bigint = 0 then first.pos else 0 end, w.lease_token
  from newest w join {schema}.swept s on s.lane = w.lane
  cross join lateral (
    select least(s.seq,
      (select e.seq - 1 from {schema}.event e where e.lane = s.lane order by e.seq limit 1),
      (select t.floor from {schema}.tick t
       where pg_snapshot_xmax(t.snapshot) <= pg_snapshot_xmin(pg_current_snapshot()) order by t.id desc limit 1)) as pos) first
  order by w.lane
  on conflict do nothing
  returning lane
)
select (select count(*) from newest) - (select count(*) from added)
