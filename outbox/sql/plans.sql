-- Plans that do not depend on statistics, for this transaction: tables that grew since they were last analysed made the page read a
-- whole lane per page (bitmap scan and sort), and JIT compilation cost more than the statement.
select set_config('enable_seqscan', 'off', true), set_config('enable_bitmapscan', 'off', true),
       set_config('plan_cache_mode', 'force_generic_plan', true), set_config('jit', 'off', true)
