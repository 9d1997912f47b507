-- Puts the owner's token into the progress of its $3 lanes and returns where they stand. The new row takes the place of the
-- one that a former owner may be adding right now; who loses the primary key sees no row and asks again.
-- A row one of whose ticks is gone, by somebody's hand or a restore of some tables, goes back to the last tick before it that is there, and to
-- the beginning of its batch: events come again, and none is passed over. Without any the from tick is null.
with newest as materialized (
  select l.lane, l.token as lease_token, l.crashes, c.n, c.token, f.id as from_tick, f.at as from_at, w.whole,
         case when w.whole then c.to_tick end as to_tick, case when w.whole then t.at end as to_at, case when w.whole then c.pos else 0 end as pos
  from {schema}.lease l
  cross join lateral (
    select c.n, c.from_tick, c.to_tick, c.pos, c.token from {schema}.cursor c
    where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1) c
  left join lateral (
    select f.id, f.at from {schema}.tick f where f.id <= c.from_tick order by f.id desc limit 1) f on true
  left join {schema}.tick t on t.id = c.to_tick
  cross join lateral (select coalesce(f.id = c.from_tick, false) and (c.to_tick is null or t.id is not null) as whole) w
  where l.subscription = $1::text and l.owner = $2::text and l.lane = any ($3::smallint[])
), added as (
  insert into {schema}.cursor (subscription, lane, n, from_tick, to_tick, pos, token)
  select $1::text, lane, n + 1, from_tick, to_tick, pos, lease_token
  from newest where from_tick is not null and (token < lease_token or not whole) order by lane
  on conflict do nothing
  returning lane, n
)
select w.lane, coalesce(a.n, w.n), w.lease_token, w.crashes, w.from_tick, w.from_at, w.to_tick, w.to_at, w.pos, w.whole
from newest w
left join added a on a.lane = w.lane
where w.token = w.lease_token and w.whole or a.lane is not null or w.from_tick is null
