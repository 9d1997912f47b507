-- The lanes of dead events: $2 numbers, null = all.
select coalesce(array_agg(distinct lane), '{}') from {schema}.failed
where subscription = $1::text and state = 'dead' and ($2::bigint[] is null or seq = any ($2::bigint[]))
