package bench

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/prepare"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// querier is what both arms have.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

const byKey = "select id, name, balance, created_at from account where id = $1"

// schema is what the statements run on. The tables are filled and analysed because a server connection that first checks a foreign key while
// they are empty keeps a plan that scans them, and whichever arm ran first would be slower for ever.
const schema = `
create table account (id bigint primary key, name text not null, balance bigint not null, created_at timestamptz not null default now());
insert into account (id, name, balance) select g, 'account ' || g, g * 7 from generate_series(1, 10000) g;
create table events(id uuid primary key, type text not null, key text, seq bigint, payload jsonb not null, headers jsonb not null default '{}', handlers text[] not null, created_at timestamptz not null default now());
create index events_created on events(created_at);
create table deliveries(event_id uuid not null references events(id), handler text not null, key text, seq bigint, due_at timestamptz not null default now(), attempt int not null default 0, status smallint not null default 0, lease_until timestamptz, worker text, primary key(event_id, handler));
create index deliveries_due on deliveries(handler, due_at) where status=0;
create index deliveries_key on deliveries(handler, key, seq) where key is not null;
create table key_sequences(key text primary key, seq bigint not null);
insert into events (id, type, payload, handlers) select gen_random_uuid(), 'old', '{}', '{mailer}' from generate_series(1, 50000);
insert into deliveries (event_id, handler, status) select id, 'mailer', 1 from events;
analyze;`

// publish is a long statement, of the size and shape of an outbox publish that reserves sequences, inserts events and deliveries.
const publish = `with input as (
  select * from unnest($1::uuid[], $2::text[], $3::text[], $4::jsonb[], $5::jsonb[]) with ordinality as t(id, type, key, payload, headers, ord)
), locked as (
  insert into key_sequences as ks (key, seq) select key, count(*) from input where key is not null group by key order by key
  on conflict (key) do update set seq = ks.seq + excluded.seq returning ks.key, ks.seq
), numbered as (
  select i.*, l.seq - (count(*) over (partition by i.key)) + (row_number() over (partition by i.key order by i.ord)) as kseq
  from input i left join locked l on l.key = i.key
), ins_events as (
  insert into events (id, type, key, seq, payload, headers, handlers)
  select id, type, key, kseq, payload, headers, $6::text[] from numbered
  on conflict (id) do nothing returning id, key, seq
), ins_deliveries as (
  insert into deliveries (event_id, handler, key, seq, due_at)
  select e.id, h.handler, e.key, e.seq, now() + make_interval(secs => $7::float8)
  from ins_events e cross join unnest($6::text[]) as h(handler)
  on conflict (event_id, handler) do nothing returning event_id, due_at
)
select (select count(*) from ins_events), (select count(*) from ins_deliveries), case when $8::bool and exists (select 1 from ins_deliveries where due_at <= now()) then pg_notify($9::text, '') is null else false end`

// server starts PostgreSQL with fsync as asked and the benchmark's schema.
func server(b testing.TB, version string, durable bool) (*postgres.Server, *postgres.Database) {
	b.Helper()
	s := postgres.Start(b, postgres.Options{Version: version, Durable: durable})
	db := s.NewDatabase(b)
	p := pool(b, db.URL, 1)
	if _, err := p.Exec(b.Context(), schema); err != nil {
		b.Fatal(err)
	}
	return s, db
}

func newExecutor(b testing.TB, p *pgxpool.Pool, cfg executor.Config) *executor.Executor {
	b.Helper()
	ex, err := executor.New(p, cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ex.Close(context.Background()) })
	return ex
}

// mode sets a bare pool's way of sending.
func mode(m pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = m }
}

func selectArm(name string, q querier, options ...any) arm {
	return arm{name, func(ctx context.Context) error {
		var id, balance int64
		var account string
		var at pgtype.Timestamptz
		args := append(make([]any, 0, 4), options...)
		return q.QueryRow(ctx, byKey, append(args, int64(77))...).Scan(&id, &account, &balance, &at)
	}}
}

// publishArm publishes one unkeyed event by the long statement. Arguments are of types that every pgx mode encodes alike.
func publishArm(name string, q querier, options ...any) arm {
	payload := json.RawMessage(`{"order": "` + strings.Repeat("x", 140) + `"}`)
	return arm{name, func(ctx context.Context) error {
		var events, deliveries int64
		var notified bool
		id := pgtype.UUID{Bytes: newUUID(), Valid: true}
		args := append(make([]any, 0, 10), options...)
		args = append(args,
			[]pgtype.UUID{id}, []string{"order.paid"}, []*string{nil}, []json.RawMessage{payload}, []json.RawMessage{json.RawMessage(`{}`)},
			[]string{"mailer"}, float64(0), false, "bench")
		return q.QueryRow(ctx, publish, args...).Scan(&events, &deliveries, &notified)
	}}
}

func BenchmarkDirectSelect(b *testing.B) {
	_, db := server(b, "", false)
	for _, clients := range []int{1, 8} {
		b.Run(clientsName(clients), func(b *testing.B) {
			bare, wrapped := pool(b, db.URL, clients), pool(b, db.URL, clients)
			ours := selectArm("executor", newExecutor(b, wrapped, executor.Config{}), prepare.Stable)
			peer := selectArm("pgx", bare)
			paired(b, clients, 4000, ours, peer)
			if clients == 1 {
				allocations(b, ours, peer)
			}
		})
	}
}

func BenchmarkDirectPublish(b *testing.B) {
	_, db := server(b, "", false)
	for _, clients := range []int{1, 8} {
		b.Run(clientsName(clients), func(b *testing.B) {
			bare, wrapped := pool(b, db.URL, clients), pool(b, db.URL, clients)
			ours := publishArm("executor", newExecutor(b, wrapped, executor.Config{}), prepare.Stable)
			peer := publishArm("pgx", bare)
			paired(b, clients, 1000, ours, peer)
			if clients == 1 {
				allocations(b, ours, peer)
			}
		})
	}
}

// The same PostgreSQL behind both arms, each through a tracking PgBouncer of its own pool.
func BenchmarkTrackedSelect(b *testing.B) {
	s, db := server(b, "17", false)
	bouncer := pgbouncer.Start(b, s, pgbouncer.Options{Version: "1.24", PoolSize: 8})
	for _, clients := range []int{1, 8} {
		b.Run(clientsName(clients), func(b *testing.B) {
			bare, wrapped := pool(b, bouncer.URL(db.Name), clients), pool(b, bouncer.URL(db.Name), clients)
			ours := selectArm("executor", newExecutor(b, wrapped, executor.Config{}), prepare.Stable)
			peer := selectArm("pgx", bare)
			paired(b, clients, 3000, ours, peer)
			if clients == 1 {
				allocations(b, ours, peer)
			}
		})
	}
}

func BenchmarkTrackedPublish(b *testing.B) {
	s, db := server(b, "17", false)
	bouncer := pgbouncer.Start(b, s, pgbouncer.Options{Version: "1.24", PoolSize: 8})
	bare, wrapped := pool(b, bouncer.URL(db.Name), 8), pool(b, bouncer.URL(db.Name), 8)
	paired(b, 8, 1000,
		publishArm("executor", newExecutor(b, wrapped, executor.Config{}), prepare.Stable), publishArm("pgx", bare))
}

// BenchmarkSharedPublish is the long statement by 32 goroutines behind PgBouncer 1.18: shared, what a pgx user gets there, and prepared
// statements behind a tracking 1.24 as the last arm. All poolers stand before one PostgreSQL with fsync on.
func BenchmarkSharedPublish(b *testing.B) {
	s, db := server(b, "17", true)
	raw := pgbouncer.Start(b, s, pgbouncer.Options{Version: "1.18", PoolSize: 8})
	tracked := pgbouncer.Start(b, s, pgbouncer.Options{Version: "1.24", PoolSize: 8})
	const clients = 32
	shared := newExecutor(b, pool(b, raw.URL(db.Name), clients), executor.Config{PreparedStatements: executor.Shared})
	auto := newExecutor(b, pool(b, raw.URL(db.Name), clients), executor.Config{Logger: quiet})
	named := newExecutor(b, pool(b, tracked.URL(db.Name), clients), executor.Config{})
	paired(b, clients, 1500,
		publishArm("shared", shared, prepare.Stable),
		publishArm("unprepared", auto, prepare.Stable),
		publishArm("pgx-exec", pool(b, raw.URL(db.Name), clients, mode(pgx.QueryExecModeExec))),
		publishArm("pgx-describe", pool(b, raw.URL(db.Name), clients, mode(pgx.QueryExecModeCacheDescribe))),
		publishArm("tracked", named, prepare.Stable),
	)
	before := shared.Stats().Misses
	run(b, b.Context(), publishArm("shared", shared, prepare.Stable), clients, 2000)
	b.ReportMetric(float64(shared.Stats().Misses-before), "misses-after-warm-up")
}
