update {schema}.subscription set skip_on_dead = $2::boolean where name = $1::text and skip_on_dead <> $2::boolean
