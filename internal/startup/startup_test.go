package startup_test

import (
	"context"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/internal/startup"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
)

func TestAskedReadsOptionsAsPostgreSQLDoes(t *testing.T) {
	t.Parallel()
	got := startup.Asked(map[string]string{
		"options": `-c search_path=a,b  --statement-timeout=5s -cTimeZone=utc -B 5 -c application_name=two\ words -c broken -c lock_timeout=1s`,
		// PostgreSQL applies parameters behind the options, so these win.
		"lock_timeout": "2s", "replication": "database", "_pq_.x": "1",
	})
	want := []startup.Setting{
		{Name: "application_name", Asked: "two words"},
		{Name: "lock_timeout", Asked: "2s"},
		{Name: "search_path", Asked: "a,b"},
		{Name: "statement_timeout", Asked: "5s"},
		{Name: "timezone", Asked: "utc"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got := startup.Asked(nil); len(got) != 0 {
		t.Error(got)
	}
}

// asked are settings in ways of writing of their own: the server shows 1min, off, Europe/Berlin and a list with spaces.
const asked = "&search_path=tenant_a,public&statement_timeout=60000&enable_seqscan=0&application_name=shop&timezone=europe/berlin"

func compare(t *testing.T, url string) (arrived, dropped []string) {
	t.Helper()
	cfg, err := pgconn.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	list, err := startup.Compare(t.Context(), conn, cfg.RuntimeParams)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if s.Arrived {
			arrived = append(arrived, s.Name)
		} else {
			dropped = append(dropped, s.Name)
		}
	}
	return arrived, dropped
}

func ignoring(names string) func(*pgbouncer.Options) {
	return func(o *pgbouncer.Options) { o.Settings["ignore_startup_parameters"] = names }
}

// The control is the direct connection, where everything arrives, the ways of writing notwithstanding.
func TestEverythingArrivesOnADirectConnection(t *testing.T) {
	t.Parallel()
	for _, p := range place.Suites(place.Direct) {
		t.Run(p.String(), func(t *testing.T) {
			t.Parallel()
			arrived, dropped := compare(t, p.Start(t).URL+asked+"&log_connections=1&ignore_system_indexes=true&options=-c%20geqo%3Doff")
			if len(dropped) > 0 || len(arrived) != 8 {
				t.Errorf("arrived %v, dropped %v", arrived, dropped)
			}
		})
	}
}

func TestWhatThePoolerIgnoresIsFound(t *testing.T) {
	t.Parallel()
	modes := []place.Mode{place.Session, place.TransactionRaw, place.Statement}
	for _, m := range modes {
		for _, p := range place.Suites(m) {
			t.Run(p.String(), func(t *testing.T) {
				t.Parallel()
				r := p.Start(t, ignoring("search_path,statement_timeout,enable_seqscan,no_such_setting,options"))
				arrived, dropped := compare(t, r.URL+asked+"&no_such_setting=1&options=-c%20search_path%3Dtenant_b")
				wantDropped := []string{"enable_seqscan", "no_such_setting", "search_path", "statement_timeout"}
				// PgBouncer tracks these two itself.
				if diff := cmp.Diff([]string{"application_name", "timezone"}, arrived); diff != "" {
					t.Error(diff)
				}
				if diff := cmp.Diff(wantDropped, dropped); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

// What doctor advises works: a setting of the role's database, and track_extra_parameters for what the server reports, which is
// search_path from PostgreSQL 18 on.
func TestTheRemediesHold(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "18").Start(t, ignoring("search_path,statement_timeout"), func(o *pgbouncer.Options) {
		o.Settings["track_extra_parameters"] = "IntervalStyle, search_path"
	})
	url := r.URL + "&search_path=tenant_a,public&statement_timeout=60000"
	if _, dropped := compare(t, url); !slices.Equal(dropped, []string{"statement_timeout"}) {
		t.Errorf("dropped %v", dropped)
	}
	conn, err := pgconn.Connect(t.Context(), r.DB.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	sql := "alter role postgres in database " + r.DB.Name + " set statement_timeout = '1min'"
	if _, err := conn.Exec(t.Context(), sql).ReadAll(); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Bouncer.Admin("reconnect"); err != nil {
		t.Fatal(err)
	}
	if _, dropped := compare(t, url); len(dropped) > 0 {
		t.Errorf("dropped %v", dropped)
	}
}

// What was compared is not left behind: the setting holds for the one statement.
func TestCompareLeavesNothing(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, ignoring("search_path"), func(o *pgbouncer.Options) { o.PoolSize = 1 })
	if _, dropped := compare(t, r.URL+"&search_path=tenant_a"); len(dropped) != 1 {
		t.Fatal(dropped)
	}
	conn, err := pgconn.Connect(t.Context(), r.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	results, err := conn.Exec(t.Context(), "show search_path").ReadAll()
	if err != nil || strings.Contains(string(results[0].Rows[0][0]), "tenant_a") {
		t.Error(err, results)
	}
}

func TestAClosedServerIsAnError(t *testing.T) {
	t.Parallel()
	r := place.New(place.Direct, "", "15").Start(t)
	cfg, err := pgconn.ParseConfig(r.URL + "&search_path=a")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if list, err := startup.Compare(ctx, conn, cfg.RuntimeParams); err == nil {
		t.Error(list)
	}
}
