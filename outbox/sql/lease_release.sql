-- Gives lanes back: $3 lanes with their $4 tokens.
update {schema}.lease l set owner = null, lease_until = '-infinity'
from unnest($3::smallint[], $4::bigint[]) as d (lane, token)
where l.subscription = $1::text and l.owner = $2::text and l.lane = d.lane and l.token = d.token
