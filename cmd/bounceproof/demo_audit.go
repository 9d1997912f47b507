package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/fallback"
)

// maxParses is how many statements may be parsed per execution where statements are prepared.
const maxParses = 0.05

// check is one statement about a run, and whether it holds.
type check struct {
	ok   bool
	text string
}

func checkf(ok bool, format string, args ...any) check {
	return check{ok, fmt.Sprintf(format, args...)}
}

// stored is what the database holds after a run, read on a direct connection with nothing of this library in between.
type stored struct {
	events    map[int64]string // the log: keys by sequence number
	order     map[string][]int64
	accounts  map[int]movement // balance and version as they are now
	undone    int64            // events that the subscription has not recorded as delivered
	parses    int64            // Parse messages that clients sent PgBouncer with a name
	forwarded int64            // Parse messages that PgBouncer sent servers for them
	binds     int64            // Bind messages with a name
	counted   bool             // PgBouncer has these three counters (1.24 and newer)
}

const sqlUndone = `
select count(*) from outbox.event e
join lateral (
  select c.from_tick, c.to_tick, c.pos from outbox.cursor c
  where c.subscription = 'demo' and c.lane = e.lane order by c.n desc limit 1
) c on true
join outbox.tick a on a.id = c.from_tick
left join outbox.tick b on b.id = c.to_tick
where not pg_visible_in_snapshot(e.xid, a.snapshot)
and (b.id is null or e.seq > c.pos or not pg_visible_in_snapshot(e.xid, b.snapshot))`

func readStored(ctx context.Context, conn *pgx.Conn) (*stored, error) {
	t := &stored{events: map[int64]string{}, order: map[string][]int64{}, accounts: map[int]movement{}}
	rows, err := conn.Query(ctx, "select seq, coalesce(key, '') from outbox.event order by seq")
	if err != nil {
		return nil, err
	}
	var seq int64
	var key string
	_, err = pgx.ForEachRow(rows, []any{&seq, &key}, func() error {
		t.events[seq] = key
		if key != "" {
			t.order[key] = append(t.order[key], seq)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if rows, err = conn.Query(ctx, "select id, balance, version from shop.account"); err != nil {
		return nil, err
	}
	var m movement
	_, err = pgx.ForEachRow(rows, []any{&m.Account, &m.Amount, &m.Version}, func() error {
		t.accounts[m.Account] = m
		return nil
	})
	if err != nil {
		return nil, err
	}
	return t, conn.QueryRow(ctx, sqlUndone).Scan(&t.undone)
}

// readCounters adds what PgBouncer itself has counted for a database. Versions before 1.24 do not count these.
func (t *stored) readCounters(stats []map[string]string, database string) error {
	for _, row := range stats {
		if row["database"] != database || row["total_server_parse_count"] == "" {
			continue
		}
		t.counted = true
		for column, to := range map[string]*int64{
			"total_client_parse_count": &t.parses, "total_server_parse_count": &t.forwarded, "total_bind_count": &t.binds,
		} {
			var err error
			if *to, err = strconv.ParseInt(row[column], 10, 64); err != nil {
				return fmt.Errorf("SHOW STATS: %s: %w", column, err)
			}
		}
	}
	return nil
}

// audit compares what a run did with what the database says.
func audit(o *outcome, t *stored) []check {
	seen := map[int64]int{}
	sums := map[int]movement{}
	order := map[string][]int64{}
	versions := map[string][]int64{}
	unknown, twice := 0, 0
	for _, d := range o.deliveries {
		seen[d.seq]++
		if seen[d.seq] > 1 {
			twice++
		}
		if key, ok := t.events[d.seq]; !ok || key != d.key {
			unknown++
		}
		sum := sums[d.Account]
		sums[d.Account] = movement{Account: d.Account, Amount: sum.Amount + d.Amount, Version: sum.Version + 1}
		if d.key != "" {
			order[d.key] = append(order[d.key], d.seq)
			versions[d.key] = append(versions[d.key], d.Version)
		}
	}
	missing := 0
	for seq := range t.events {
		if seen[seq] == 0 {
			missing++
		}
	}
	return []check{
		checkf(o.committed > 0 && len(t.events) == o.committed,
			"%s transactions committed, %s events in the log", thousands(o.committed), thousands(len(t.events))),
		checkf(missing == 0 && unknown == 0 && t.undone == 0,
			"every event delivered and recorded as delivered%s", nonZero(
				missing, "missing", unknown, "that nobody published", int(t.undone), "not recorded")),
		checkf(twice == 0, "none delivered twice%s", nonZero(twice, "repeated")),
		inOrder(order, versions, t.order),
		agree(sums, t.accounts),
	}
}

// inOrder checks the deliveries of each key against the log and against the versions of the business row, which count the
// commits.
func inOrder(order, versions, log map[string][]int64) check {
	bad := 0
	for key := range log {
		straight := slices.Equal(order[key], log[key])
		for i, v := range versions[key] {
			straight = straight && v == int64(i)+1
		}
		if !straight {
			bad++
		}
	}
	return checkf(bad == 0 && len(log) > 0, "%d keys delivered in the order of their commits%s", len(log), nonZero(bad, "not in order"))
}

// agree checks the business rows against the sums of what was delivered.
func agree(sums, accounts map[int]movement) check {
	bad := 0
	for id, now := range accounts {
		if sum := sums[id]; sum.Amount != now.Amount || sum.Version != now.Version {
			bad++
		}
	}
	return checkf(bad == 0 && len(accounts) > 0, "%d business rows agree with the events%s", len(accounts), nonZero(bad, "do not"))
}

// nonZero lists the counts that are not zero.
func nonZero(pairs ...any) string {
	var said []string
	for i := 0; i < len(pairs); i += 2 {
		if n, _ := pairs[i].(int); n > 0 {
			said = append(said, fmt.Sprintf("%s %s", thousands(n), pairs[i+1]))
		}
	}
	if len(said) == 0 {
		return ""
	}
	return ": " + strings.Join(said, ", ")
}

// executions is how many statements the executor knows to have run.
func executions(s executor.Stats) int64 { return s.Named + s.Unprepared + s.Shared }

// parsesPerExecution is how many Parse messages an execution cost.
func parsesPerExecution(s executor.Stats) float64 {
	if n := executions(s); n > 0 {
		return float64(s.Parses) / float64(n)
	}
	return 0
}

// strategyOf is the way in which most statements were sent.
func strategyOf(s executor.Stats) fallback.Strategy {
	by := map[int64]fallback.Strategy{}
	by[s.Shared], by[s.Unprepared], by[s.Named] = fallback.Shared, fallback.Unprepared, fallback.Named
	return by[slices.Max(slices.Collect(maps.Keys(by)))]
}

// auditStatements checks what the executor says about statements, where possible against PgBouncer's own counters.
func auditStatements(r *row, o *outcome, t *stored, logged []record) []check {
	checks := []check{checkf(o.failures == 0, "%s%s", some(o.failures, "failure"), first(o.firstErr))}
	if r.named {
		n := parsesPerExecution(o.stats)
		checks = append(checks, checkf(n < maxParses, "%.4f statements parsed per execution, fewer than %.2f", n, maxParses))
	}
	if t.counted {
		// Statements without a name pass PgBouncer uncounted; the probe's one with a name was not the executor's.
		binds, parses := o.total.Named, o.total.Parses-o.total.Unprepared+1
		checks = append(checks, checkf(near(t.binds, binds) && near(t.parses, parses),
			"%s executions by name and %s parses of a name, of which PgBouncer's SHOW STATS counts %s and %s",
			number(binds), number(parses), number(t.binds), number(t.parses)))
		n := float64(t.forwarded) / float64(max(1, t.binds))
		checks = append(checks, checkf(n < maxParses, "%.4f statements parsed per execution by the servers behind it (total_server_parse_count)", n))
	}
	warnings := count(logged, slog.LevelWarn)
	if warnings == r.warnings {
		return append(checks, checkf(true, "%s, as there should be", some(warnings, "warning")))
	}
	return append(checks, checkf(false, "%s instead of %d", some(warnings, "warning"), r.warnings))
}

// near reports whether two counts of the same thing agree: a statement under way when the dispatchers are told to stop is
// counted by one side only.
func near(a, b int64) bool { return max(a, b)-min(a, b) <= 2*demoDispatchers }

func number(n int64) string { return thousands(int(n)) }

// some is a number and a noun.
func some(n int, noun string) string {
	switch n {
	case 0:
		return "no " + noun + "s"
	case 1:
		return "1 " + noun
	}
	return thousands(n) + " " + noun + "s"
}

func first(err error) string {
	if err == nil {
		return ""
	}
	return ", the first: " + oneLine(err.Error())
}

// count is how many records have a level.
func count(logged []record, level slog.Level) int {
	n := 0
	for _, l := range logged {
		if l.level == level {
			n++
		}
	}
	return n
}
