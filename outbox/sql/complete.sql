-- Moves lanes on: compare-and-swap on the newest row's number, token, from tick and position, because after a failover that lost the last
-- rows an older one may look like the one that was read; both ticks of the new row by id and time, because ids are issued again then. A
-- lane that is not returned has been moved by somebody else.
-- $2 lanes, $3 tokens, $4 old from, $5 old pos, $6 from, $7 its time, $8 to (null = none), $9 its time, $10 pos, $11 old n.
insert into {schema}.cursor (subscription, lane, n, from_tick, to_tick, pos, token)
select $1::text, d.lane, c.n + 1, d.from_tick, d.to_tick, d.pos, d.token
from unnest($2::smallint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::timestamptz[], $8::bigint[],
            $9::timestamptz[], $10::bigint[], $11::bigint[])
  as d (lane, token, old_from, old_pos, from_tick, from_at, to_tick, to_at, pos, old_n)
cross join lateral (
  select c.n, c.from_tick, c.pos, c.token from {schema}.cursor c
  where c.subscription = $1::text and c.lane = d.lane order by c.n desc limit 1) c
where c.n = d.old_n and c.token = d.token and c.from_tick = d.old_from and c.pos = d.old_pos
  and exists (select 1 from {schema}.tick f where f.id = d.from_tick and f.at = d.from_at)
  and (d.to_tick is null or exists (select 1 from {schema}.tick t where t.id = d.to_tick and t.at = d.to_at))
order by d.lane
on conflict do nothing
returning lane
