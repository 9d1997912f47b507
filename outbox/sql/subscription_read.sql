select skip_on_dead from {schema}.subscription where name = $1::text
