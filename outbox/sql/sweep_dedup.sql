delete from {schema}.dedup where key in (select key from {schema}.dedup where at < clock_timestamp() - $1::interval limit 10000)
