-- One lane's oldest events, up to 10,000: those published more than $2 ago that every subscription has seen in its from tick, up to the
-- first that is not. The mark says where a subscription from earliest begins.
with mark as materialized (select s.seq from {schema}.swept s where s.lane = $1::smallint for update),
snapshots as materialized (
  select t.snapshot from {schema}.subscription s
  cross join lateral (
    select c.from_tick from {schema}.cursor c where c.subscription = s.name and c.lane = $1::smallint order by c.n desc limit 1) c
  cross join lateral (
    select t.snapshot from {schema}.tick t where t.id <= c.from_tick order by t.id desc limit 1) t  -- its own, else see cursor_adopt.sql
), batch as materialized (
  select e.seq, e.xid, e.published_at from mark
  cross join lateral (
    select e.seq, e.xid, e.published_at from {schema}.event e
    where e.lane = $1::smallint and e.seq > mark.seq order by e.seq limit 10000) e
), bound as materialized (
  select coalesce(
    (select min(b.seq) - 1 from batch b
     where b.published_at > clock_timestamp() - $2::interval
        or exists (select 1 from snapshots s where not pg_visible_in_snapshot(b.xid, s.snapshot))),
    (select max(b.seq) from batch b)) as seq
), moved as (
  update {schema}.swept s set seq = bound.seq from bound, mark where s.lane = $1::smallint and bound.seq > mark.seq
)
delete from {schema}.event e using mark, bound
where e.lane = $1::smallint and e.seq > mark.seq and e.seq <= bound.seq
