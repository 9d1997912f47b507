-- Somebody who is not the owner is about to change lanes: what their owners know of them is void from here on.
-- $2 lanes, null = all. By chance, see lease_claim.sql.
with locked as (
  select l.lane from {schema}.lease l
  where l.subscription = $1::text and ($2::smallint[] is null or l.lane = any ($2::smallint[]))
  order by l.lane for update
)
update {schema}.lease l set token = l.token + 1 + floor(random() * 2147483647)::bigint
from locked where l.subscription = $1::text and l.lane = locked.lane
