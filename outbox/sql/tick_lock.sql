-- A statement of its own, so that the snapshot of the tick is younger than the lock. It takes no transaction id.
select pg_advisory_xact_lock($1::bigint),
       case when current_setting('synchronous_commit') = 'off' then set_config('synchronous_commit', 'on', true) end
