-- What an owner needs to know to take its share: live members, its rank among them, lanes, free lanes.
select count(*) as members,
       count(*) filter (where m.owner < $2::text) as rank,
       (select count(*) from {schema}.lease l where l.subscription = $1::text) as lanes,
       (select count(*) from {schema}.lease l where l.subscription = $1::text
          and (l.owner is null or l.lease_until <= clock_timestamp())) as free
from {schema}.member m
where m.subscription = $1::text and (m.seen_until > clock_timestamp() or m.owner = $2::text)
