-- Pages of several lanes: $1 lanes, $2 from ticks, $3 to ticks (null = the newest), $4 positions, $5 events a lane.
-- Every lane returns at least one row. Both bounds stand inside the index condition; low is the floor of the from tick, or
-- further back, of the oldest late arrival's own time.
select l.lane, b.id, b.at, u.seq, u.type, u.key, u.payload, u.headers, u.published_at
from unnest($1::smallint[], $2::bigint[], $3::bigint[], $4::bigint[], $5::integer[]) as l (lane, a, b, pos, size)
left join lateral (
  select tb.id, tb.at, tb.tip, ta.snapshot as sa, tb.snapshot as sb,
         least(ta.floor, (
           select coalesce((select t.floor from {schema}.tick t
                            where t.id <= l.a and pg_snapshot_xmax(t.snapshot) <= late.xid
                            order by t.id desc limit 1), 0)
           from (select x.xid from pg_snapshot_xip(ta.snapshot) as x (xid)
                 where pg_visible_in_snapshot(x.xid, tb.snapshot) order by x.xid limit 1) late)) as low
  from {schema}.tick ta, {schema}.tick tb
  where ta.id = l.a and tb.id = coalesce(l.b, (select max(n.id) from {schema}.tick n)) and tb.id > ta.id
  offset 0) b on true
left join lateral (
  select e.seq, e.type, e.key, e.payload, e.headers, e.published_at
  from {schema}.event e
  where e.lane = l.lane and e.seq > greatest(l.pos, b.low) and e.seq <= b.tip
    and not pg_visible_in_snapshot(e.xid, b.sa) and pg_visible_in_snapshot(e.xid, b.sb)
  order by e.seq limit l.size) u on true
order by l.lane, u.seq
