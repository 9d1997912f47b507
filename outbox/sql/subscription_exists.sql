select exists (select 1 from {schema}.subscription where name = $1::text)
