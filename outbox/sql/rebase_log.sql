-- The log forgets the transaction ids of the former cluster, and with them its ticks.
with ticks as (delete from {schema}.tick where id > 0),
     base as (insert into {schema}.tick (id, floor, tip, snapshot, xid) values (0, 0, 0, '1:1:', '1') on conflict do nothing),
     events as (update {schema}.event set xid = '3' where xid <> '3')
update {schema}.meta m set system_identifier = s.system_identifier, database_oid = d.oid
from pg_control_system() s, pg_database d where d.datname = current_database()
