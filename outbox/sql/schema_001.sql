-- The first schema. Every later change is a file of its own; a published file never changes.
create table {schema}.meta (
  singleton boolean primary key default true check (singleton),
  version integer not null,
  lanes smallint not null check (lanes between 1 and 1024),
  hash text not null,
  system_identifier bigint not null,
  database_oid oid not null,
  created_at timestamptz not null default clock_timestamp()
);

create sequence {schema}.event_seq as bigint increment by 1 minvalue 1 cache 1 no cycle;

-- The log. No index but the primary key: a second one would double the WAL of a publish.
create table {schema}.event (
  lane smallint not null check (lane >= 0 and lane < {lanes}),
  seq bigint not null,
  xid xid8 not null,
  type text not null,
  key text,
  payload bytea not null,
  headers jsonb,
  published_at timestamptz not null,
  primary key (lane, seq)
);

-- Points in time between which a batch lies. xid is the tick's own: a transaction that drew its sequence number
-- before this tick read its tip has a smaller one, so that only those below it can surface later at or under the tip.
create table {schema}.tick (
  id bigint primary key,
  floor bigint not null,
  tip bigint not null,
  snapshot pg_snapshot not null,
  xid xid8 not null default pg_current_xact_id(),
  at timestamptz not null default clock_timestamp()
);
insert into {schema}.tick (id, floor, tip, snapshot, xid) values (0, 0, 0, '1:1:', '1');

create table {schema}.subscription (
  name text primary key,
  skip_on_dead boolean not null default false,
  created_at timestamptz not null default clock_timestamp()
);

create table {schema}.member (
  subscription text not null,
  owner text not null,
  seen_until timestamptz not null,
  holds bigint[] not null default '{}',  -- ticks it has in memory and no position names
  primary key (subscription, owner)
) with (fillfactor = 50);

create table {schema}.lease (
  subscription text not null,
  lane smallint not null,
  owner text,
  token bigint not null default 0,
  lease_until timestamptz not null default '-infinity',
  crashes integer not null default 0,
  primary key (subscription, lane)
) with (fillfactor = 50);

-- Progress, insert-only: the row with the greatest n counts, and its token says who may add the next one.
create table {schema}.cursor (
  subscription text not null,
  lane smallint not null,
  n bigint not null,
  from_tick bigint not null,
  to_tick bigint,
  pos bigint not null default 0,
  token bigint not null,
  primary key (subscription, lane, n)
);

create table {schema}.failed (
  subscription text not null,
  lane smallint not null,
  seq bigint not null,
  key text,
  type text not null,
  payload bytea not null,
  headers jsonb,
  published_at timestamptz not null,
  attempt integer not null,
  state text not null check (state in ('retry', 'parked', 'dead')),
  due_at timestamptz,
  last_error text,
  failed_at timestamptz not null default clock_timestamp(),
  primary key (subscription, lane, seq)
);
create index failed_key on {schema}.failed (subscription, lane, key, seq);

create table {schema}.scheduled (
  id bigint generated always as identity primary key,
  due_at timestamptz not null,
  lane smallint not null,
  lock bigint,
  type text not null,
  key text,
  payload bytea not null,
  headers jsonb,
  scheduled_at timestamptz not null default clock_timestamp()
);
create index scheduled_due on {schema}.scheduled (due_at, id);

create table {schema}.dedup (
  key text primary key,
  at timestamptz not null default clock_timestamp()
);
create index dedup_at on {schema}.dedup using brin (at);

-- How far each lane's events were deleted.
create table {schema}.swept (
  lane smallint primary key,
  seq bigint not null default 0,
  late_at timestamptz not null default clock_timestamp()
);

insert into {schema}.swept (lane) select generate_series(0, {lanes} - 1);
insert into {schema}.meta (version, lanes, hash, system_identifier, database_oid)
select 1, {lanes}, {hash}, s.system_identifier, d.oid
from pg_control_system() s, pg_database d where d.datname = current_database();
