-- A dispatcher says that it lives, whether or not it holds a lane.
insert into {schema}.member (subscription, owner, seen_until, holds)
values ($1::text, $2::text, clock_timestamp() + $3::interval, $4::bigint[])
on conflict (subscription, owner) do update set seen_until = excluded.seen_until, holds = excluded.holds
