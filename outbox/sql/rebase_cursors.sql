-- Sets every position before its first event that is not delivered for certain: not visible in its from tick, in its open batch behind
-- its position, or drawn after the last tick. From there on it counts by numbers alone: from the base tick.
insert into {schema}.cursor (subscription, lane, n, from_tick, pos, token)
select l.subscription, l.lane, c.n + 1, 0, coalesce(first.seq - 1, last.seq), l.token
from {schema}.lease l
cross join lateral (
  select c.n, c.from_tick, c.to_tick, c.pos from {schema}.cursor c
  where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
left join {schema}.tick ta on ta.id = c.from_tick
left join {schema}.tick tb on tb.id = c.to_tick
cross join (select max(t.tip) as tip from {schema}.tick t) old
cross join (select coalesce(pg_sequence_last_value(q.tableoid), 0) as seq from {schema}.event_seq q) last
cross join lateral (
  select min(e.seq) as seq from {schema}.event e
  where e.lane = l.lane and (
    e.seq > old.tip
    or coalesce(not pg_visible_in_snapshot(e.xid, ta.snapshot), true)
       and not (e.seq <= c.pos and (c.to_tick is null or coalesce(pg_visible_in_snapshot(e.xid, tb.snapshot), false))))) first
