-- The time is the statement's: a volatile one is no index condition.
delete from {schema}.dedup where key in (select key from {schema}.dedup where at < statement_timestamp() - $1::interval order by at limit 10000)
