-- Publishes up to 256 due events as publish_many does; rows that another dispatcher moves are passed over. Order within a key is the
-- order of moving.
with due as materialized (
  select s.* from {schema}.scheduled s where s.due_at <= statement_timestamp()
  order by s.due_at, s.id limit 256 for update skip locked
), gone as (
  delete from {schema}.scheduled s using due d where s.id = d.id
), x as materialized (select pg_current_xact_id() as xid),
locks as materialized (
  select count(pg_advisory_xact_lock(d.k)) as n
  from (select distinct lock as k from due where lock is not null order by lock) d
)
insert into {schema}.event (lane, seq, xid, type, key, payload, headers, published_at)
select d.lane, nextval('{schema}.event_seq'), x.xid, d.type, d.key, d.payload, d.headers, clock_timestamp()
from x cross join locks cross join due d
order by d.due_at, d.id
