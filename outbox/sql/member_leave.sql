-- A dispatcher leaves, and the dead ones with it.
delete from {schema}.member
where subscription = $1::text and (owner = $2::text or seen_until < clock_timestamp() - interval '10 minutes')
