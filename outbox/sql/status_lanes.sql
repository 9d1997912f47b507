-- Every lane of every subscription, with the events that are committed and not delivered: counted as the reader finds them, up to
-- this moment.
select s.name, s.skip_on_dead, l.lane, coalesce(l.owner, ''), l.owner is not null and l.lease_until > clock_timestamp(), l.crashes,
       l.token, c.from_tick, c.to_tick, c.pos, p.pending, p.oldest,
       (select count(*) from {schema}.member m where m.subscription = s.name and m.seen_until > clock_timestamp())
from {schema}.subscription s
join {schema}.lease l on l.subscription = s.name
cross join lateral (
  select c.from_tick, c.to_tick, c.pos from {schema}.cursor c
  where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
cross join lateral (
  select ta.* from {schema}.tick ta where ta.id <= c.from_tick order by ta.id desc limit 1) ta  -- its own, else see cursor_adopt.sql
left join {schema}.tick tb on tb.id = c.to_tick
cross join lateral (
  select case when ta.id = c.from_tick and (c.to_tick is null or tb.id is not null) then c.pos else 0 end as pos) w
cross join lateral (
  select least(ta.floor, (
    select coalesce((select t.floor from {schema}.tick t
                     where t.id <= ta.id and pg_snapshot_xmax(t.snapshot) <= late.xid
                     order by t.id desc limit 1), 0)
    from (select x.xid from pg_snapshot_xip(ta.snapshot) as x (xid)
          where pg_visible_in_snapshot(x.xid, pg_current_snapshot()) order by x.xid limit 1) late)) as low) b
cross join lateral (
  select count(*) as pending, min(e.published_at) as oldest
  from {schema}.event e
  where e.lane = l.lane and e.seq > b.low and not pg_visible_in_snapshot(e.xid, ta.snapshot)
    and (e.seq > w.pos or tb.id is not null and not pg_visible_in_snapshot(e.xid, tb.snapshot))) p
order by s.name, l.lane
