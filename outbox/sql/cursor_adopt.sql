-- Puts the owner's token into the progress of its $3 lanes and returns where they stand. The new row takes the place of the
-- one that a former owner may be adding right now; who loses the primary key sees no row and asks again.
with newest as materialized (
  select l.lane, l.token as lease_token, l.crashes, c.n, c.from_tick, c.to_tick, c.pos, c.token
  from {schema}.lease l
  cross join lateral (
    select c.n, c.from_tick, c.to_tick, c.pos, c.token from {schema}.cursor c
    where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
  where l.subscription = $1::text and l.owner = $2::text and l.lane = any ($3::smallint[])
), added as (
  insert into {schema}.cursor (subscription, lane, n, from_tick, to_tick, pos, token)
  select $1::text, lane, n + 1, from_tick, to_tick, pos, lease_token from newest where token < lease_token order by lane
  on conflict do nothing
  returning lane
)
select w.lane, w.lease_token, w.crashes, w.from_tick, f.at, w.to_tick, t.at, w.pos
from newest w
join {schema}.tick f on f.id = w.from_tick
left join {schema}.tick t on t.id = w.to_tick
where w.token = w.lease_token or w.lane in (select lane from added)
