-- Takes up to $4 free lanes. The token grows with every change of hands, by chance, so that a failover that lost the last ones does not make
-- it grow to the same again; a lease that ran out instead of being released
-- is a crash. The owner's own that ran out stay as they are, to be renewed: work of theirs may be with its handlers.
with free as (
  select l.lane from {schema}.lease l
  where l.subscription = $1::text and (l.owner is null or l.lease_until <= clock_timestamp() and l.owner <> $2::text)
  order by l.lane limit $4::integer
  for update skip locked
)
update {schema}.lease l
set owner = $2::text, token = l.token + 1 + floor(random() * 2147483647)::bigint, lease_until = clock_timestamp() + $3::interval, lasts = $3::interval,
    crashes = l.crashes + case when l.owner is null then 0 else 1 end
from free
where l.subscription = $1::text and l.lane = free.lane
returning l.lane, l.token
