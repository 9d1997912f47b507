update {schema}.failed set state = 'retry', attempt = 0, due_at = clock_timestamp(), last_error = null
where subscription = $1::text and state = 'dead' and ($2::bigint[] is null or seq = any ($2::bigint[]))
