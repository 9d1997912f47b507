delete from {schema}.failed
where subscription = $1::text and state = 'dead' and ($2::bigint[] is null or seq = any ($2::bigint[]))
