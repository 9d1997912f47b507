-- Failed events, in order, behind number $2.
select f.lane, f.seq, f.type, f.key, f.payload, f.headers, f.published_at, f.attempt, f.state, f.due_at, coalesce(f.last_error, ''),
       f.failed_at
from {schema}.failed f
where f.subscription = $1::text and f.seq > $2::bigint and ($3::text = '' or f.state = $3::text)
order by f.seq limit $4::integer
