-- The log as a whole.
select (select case when is_called then last_value else last_value - 1 end from {schema}.event_seq),
       (select max(t.id) from {schema}.tick t),
       (select count(*) from {schema}.tick t),
       (select count(*) from {schema}.scheduled s)
