-- A page came to its end: the crashes before it were not its fault.
update {schema}.lease l set crashes = 0
from unnest($3::smallint[], $4::bigint[]) as d (lane, token)
where l.subscription = $1::text and l.owner = $2::text and l.lane = d.lane and l.token = d.token and l.crashes > 0
