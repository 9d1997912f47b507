-- A statement of its own, so that the snapshot of the tick is younger than the lock. It takes no transaction id. The settings
-- are those of plans.sql.
select pg_advisory_xact_lock($1::bigint),
       case when current_setting('synchronous_commit') = 'off' then set_config('synchronous_commit', 'on', true) end,
       set_config('enable_seqscan', 'off', true), set_config('plan_cache_mode', 'force_generic_plan', true),
       set_config('jit', 'off', true)
