-- From the base tick, a lane begins where retention left it; from any other the position follows from the ticks.
with added as (
  insert into {schema}.subscription (name, skip_on_dead) values ($1::text, $3::boolean)
), leases as (
  insert into {schema}.lease (subscription, lane)
  select $1::text, l from {schema}.meta m, generate_series(0, m.lanes - 1) l
)
insert into {schema}.cursor (subscription, lane, n, from_tick, pos, token)
select $1::text, s.lane, 0, $2::bigint, case when $2::bigint = 0 then s.seq else 0 end, 0 from {schema}.swept s
