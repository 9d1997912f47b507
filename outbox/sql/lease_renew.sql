-- Renews all leases of an owner. One that was taken over is not among the returned.
update {schema}.lease set lease_until = clock_timestamp() + $3::interval
where subscription = $1::text and owner = $2::text
returning lane, token
