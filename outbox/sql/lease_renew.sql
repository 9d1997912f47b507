-- Renews all leases of an owner, and returns the numbers of their newest rows. One that was taken over is not among the
-- returned, nor one that somebody has locked to bump its token: the others must not wait.
with mine as materialized (
  select l.lane from {schema}.lease l where l.subscription = $1::text and l.owner = $2::text order by l.lane for update skip locked
)
update {schema}.lease l set lease_until = clock_timestamp() + $3::interval, lasts = $3::interval
from mine where l.subscription = $1::text and l.lane = mine.lane
returning l.lane, l.token, (
  select c.n from {schema}.cursor c where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1)
