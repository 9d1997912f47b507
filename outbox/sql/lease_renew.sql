-- Renews all leases of an owner, and returns the numbers of their newest rows. One that was taken over is not among the returned.
update {schema}.lease l set lease_until = clock_timestamp() + $3::interval, lasts = $3::interval
where l.subscription = $1::text and l.owner = $2::text
returning l.lane, l.token, (
  select c.n from {schema}.cursor c where c.subscription = l.subscription and c.lane = l.lane order by c.n desc limit 1)
