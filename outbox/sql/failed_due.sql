-- Events to be tried again: of $3 keys, or $4 numbers where the key is null, in $2 lanes, up to $5 events each, in order.
select d.lane, f.seq, f.type, f.key, f.payload, f.headers, f.published_at, f.attempt
from unnest($2::smallint[], $3::text[], $4::bigint[], $5::integer[]) as d (lane, key, seq, size)
cross join lateral (
  (select x.* from {schema}.failed x
   where d.key is not null and x.subscription = $1::text and x.lane = d.lane
     and hashtextextended(x.key, 0) = hashtextextended(d.key, 0) and x.key = d.key and x.state <> 'dead'
   order by x.seq limit d.size)
  union all
  (select x.* from {schema}.failed x
   where d.key is null and x.subscription = $1::text and x.lane = d.lane and x.seq = d.seq and x.state <> 'dead')
) f
order by d.lane, f.seq
