-- Pages of several lanes: $1 lanes, $2 from ticks, $3 to ticks (null = the newest), $4 positions, $5 events a lane, $6 and $7 the times of
-- the ticks. A lane one of whose ticks is gone, or has become another one, gets no tick back and has to read its row again.
-- Every lane returns at least one row. Both bounds stand inside the index condition; low is the floor of the from tick, or
-- further back, of the oldest late arrival's own time.
select l.lane, b.id, b.at, u.seq, u.type, u.key, u.payload, u.headers, u.published_at
from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::integer[], $6::timestamptz[], $7::timestamptz[])
  as l (lane, a, b, pos, size, a_at, b_at)
left join lateral (
  select tb.id, tb.at, tb.tip, ta.snapshot as sa, tb.snapshot as sb,
         least(ta.floor, (
           select coalesce((select t.floor from {schema}.tick t
                            where t.id <= l.a and pg_snapshot_xmax(t.snapshot) <= late.xid
                            order by t.id desc limit 1), 0)
           from (select x.xid from pg_snapshot_xip(ta.snapshot) as x (xid)
                 where pg_visible_in_snapshot(x.xid, tb.snapshot) order by x.xid limit 1) late)) as low
  from {schema}.tick ta, {schema}.tick tb
  where ta.id = l.a and ta.at = l.a_at
    and tb.id = coalesce(l.b, (select max(n.id) from {schema}.tick n)) and (l.b is null or tb.at = l.b_at)
  offset 0) b on true
left join lateral (
  select e.seq, e.type, e.key, e.payload, e.headers, e.published_at
  from {schema}.event e
  where b.id > l.a
    and e.lane = l.lane and e.seq > greatest(l.pos, b.low) and e.seq <= b.tip
    and not pg_visible_in_snapshot(e.xid, b.sa) and pg_visible_in_snapshot(e.xid, b.sb)
  order by e.seq limit l.size) u on true
order by l.lane, u.seq
