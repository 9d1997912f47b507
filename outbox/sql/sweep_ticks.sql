-- Ticks nobody needs. Kept are the base tick, the newest two, those of the last minute, those a position names or a living dispatcher
-- holds in memory, those newer than the oldest open transaction, and the first of each minute for the retention time. A tick that is
-- missed only lowers a floor: slow, not wrong.
with needed as materialized (
  select n.id from {schema}.lease l
  cross join lateral (
    select c.from_tick, c.to_tick from {schema}.cursor c
    where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
  cross join lateral (values (c.from_tick), (c.to_tick)) as n (id)
  union
  select h.id from {schema}.member m cross join lateral unnest(m.holds) as h (id) where m.seen_until > clock_timestamp()
), old as materialized (
  select t.id from {schema}.tick t
  where t.id > 0 and t.id < (select max(n.id) - 1 from {schema}.tick n)
    and t.at < clock_timestamp() - interval '1 minute'
    and t.xid < pg_snapshot_xmin(pg_current_snapshot())
    and not exists (select 1 from needed n where n.id = t.id)
    and (t.at < clock_timestamp() - $1::interval
         or (select b.at from {schema}.tick b where b.id < t.id order by b.id desc limit 1) >= date_trunc('minute', t.at))
  order by t.id limit 10000
)
delete from {schema}.tick t using old where t.id = old.id
