-- The last tick before the first that is younger than $1: the clock may have been set back in between.
select coalesce(max(t.id), 0) from {schema}.tick t
where t.at <= $1::timestamptz and t.id < coalesce((select min(n.id) from {schema}.tick n where n.at > $1::timestamptz), 9223372036854775807)
