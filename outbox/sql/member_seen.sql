-- A dispatcher says that it lives, whether or not it holds a lane. What others said before the clock was set back would hold until it has
-- caught up: nothing lasts longer from now on than it was meant to.
with leases as materialized (
  select l.lane from {schema}.lease l
  where l.subscription = $1::text and l.owner <> $2::text and l.lease_until > clock_timestamp() + l.lasts + interval '1 second'
  order by l.lane for update skip locked
), shorter as (
  update {schema}.lease l set lease_until = clock_timestamp() + l.lasts
  from leases where l.subscription = $1::text and l.lane = leases.lane
), members as materialized (
  select m.owner from {schema}.member m
  where m.subscription = $1::text and m.owner <> $2::text and m.seen_until > clock_timestamp() + m.lasts + interval '1 second'
  order by m.owner for update skip locked
), briefer as (
  update {schema}.member m set seen_until = clock_timestamp() + m.lasts
  from members where m.subscription = $1::text and m.owner = members.owner
)
insert into {schema}.member (subscription, owner, seen_until, holds, lasts)
values ($1::text, $2::text, clock_timestamp() + $3::interval, $4::bigint[], $3::interval)
on conflict (subscription, owner) do update set seen_until = excluded.seen_until, holds = excluded.holds, lasts = excluded.lasts
