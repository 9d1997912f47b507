-- From the base tick, a lane begins where retention left it, which only saves reading what is gone: before the first event that is there, and
-- before those that open transactions may hold, below the mark too. From any other tick the position follows from the ticks.
with added as (
  insert into {schema}.subscription (name, skip_on_dead) values ($1::text, $3::boolean)
), leases as (
  insert into {schema}.lease (subscription, lane)
  select $1::text, l from {schema}.meta m, generate_series(0, m.lanes - 1) l
)
insert into {schema}.cursor (subscription, lane, n, from_tick, pos, token)
select $1::text, s.lane, 0, $2::bigint, case when $2::bigint = 0 then first.pos else 0 end, 0
from {schema}.swept s
cross join lateral (
  select least(s.seq,
    (select e.seq - 1 from {schema}.event e where e.lane = s.lane order by e.seq limit 1),
    (select t.floor from {schema}.tick t
     where pg_snapshot_xmax(t.snapshot) <= pg_snapshot_xmin(pg_current_snapshot()) order by t.id desc limit 1)) as pos) first
