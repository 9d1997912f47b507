select coalesce((select id from {schema}.tick where at <= $1::timestamptz order by id desc limit 1), 0)
