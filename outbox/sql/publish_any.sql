-- Many events, some of them due later or with a key against doubles: $7 due times, $8 such keys (both null = none), $9 further locks. A double is left
-- out; of two in one call the first stays. What is due later is decided once.
with x as materialized (select pg_current_xact_id() as xid),
locks as materialized (
  select count(pg_advisory_xact_lock(d.k)) as n
  from (select distinct k from unnest($2::bigint[] || $9::bigint[]) k where k is not null order by k) d
), input as materialized (
  select e.*, coalesce(e.due > clock_timestamp(), false) as later,
         row_number() over (partition by e.dedup order by e.ord) as nth
  from locks cross join unnest($1::smallint[], $2::bigint[], $3::text[], $4::text[], $5::bytea[], $6::jsonb[], $7::timestamptz[], $8::text[])
    with ordinality as e (lane, lock, type, key, payload, headers, due, dedup, ord)
), fresh as (
  insert into {schema}.dedup (key)
  select i.dedup from input i where i.dedup is not null and i.nth = 1 order by i.dedup
  on conflict do nothing
  returning key
), chosen as materialized (
  select i.* from input i where i.dedup is null or i.nth = 1 and i.dedup in (select key from fresh)
), scheduled as (
  insert into {schema}.scheduled (due_at, lane, lock, type, key, payload, headers)
  select c.due, c.lane, c.lock, c.type, c.key, c.payload, c.headers from chosen c where c.later order by c.ord
)
insert into {schema}.event (lane, seq, xid, type, key, payload, headers, published_at)
select c.lane, nextval('{schema}.event_seq'), x.xid, c.type, c.key, c.payload, c.headers, clock_timestamp()
from x cross join chosen c
where not c.later
order by c.ord
