package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/place"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// examine runs the doctor and compares what it prints with golden files, at the usual width and at those of a narrow and of a wide terminal.
func examine(t *testing.T, name string, code int, args ...string) *diagnosis {
	t.Helper()
	got, stdout, stderr := command(t.Context(), append([]string{"doctor", "--json"}, args...)...)
	if got != code || stderr != "" {
		t.Errorf("status %d, want %d; %s", got, code, stderr)
	}
	d := new(diagnosis)
	if err := json.Unmarshal([]byte(stdout), d); err != nil {
		t.Fatalf("%v:\n%s", err, stdout)
	}
	snakeCase(t, stdout)
	// Masked before it is printed: where lines break depends on how long names are.
	masked := strings.ReplaceAll(stdout, d.Database, "shop")
	masked = regexp.MustCompile(`"postgresql": "[^"]*"`).ReplaceAllString(mask(masked), `"postgresql": "V"`)
	printed := new(diagnosis)
	if err := json.Unmarshal([]byte(masked), printed); err != nil {
		t.Fatalf("%v:\n%s", err, masked)
	}
	var all strings.Builder
	for _, width := range []int{60, 120} {
		var out strings.Builder
		printed.print(&view{out: &out, width: width})
		for line := range strings.Lines(out.String()) {
			if n := len([]rune(strings.TrimSuffix(line, "\n"))); n > width {
				t.Errorf("%d columns at a width of %d: %q", n, width, line)
			}
		}
		fmt.Fprintf(&all, "--- %d columns\n%s", width, out.String())
	}
	golden(t, "doctor_"+name, all.String())
	return d
}

// snakeCase checks the keys of a JSON document.
func snakeCase(t *testing.T, document string) {
	t.Helper()
	var check func(any)
	check = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for key, inner := range v {
				if key != strings.ToLower(key) || strings.ContainsAny(key, " -") {
					t.Errorf("key %q", key)
				}
				check(inner)
			}
		case []any:
			for _, inner := range v {
				check(inner)
			}
		}
	}
	var v any
	if err := json.Unmarshal([]byte(document), &v); err != nil {
		t.Error(err)
	}
	check(v)
}

// closedPort is an address at which nothing listens.
func closedPort(t *testing.T) string {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return l.Addr().String()
}

func hostOf(t *testing.T, url string) string {
	t.Helper()
	cfg, err := pgconn.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("%s:%d", cfg.Host, cfg.Port)
}

func problems(d *diagnosis) (all []string) {
	for _, f := range d.Findings {
		if f.Severity == problem {
			all = append(all, f.What)
		}
	}
	return all
}

// A setting that PgBouncer was told to ignore is a problem. The control is the same string to the server itself.
func TestDoctorFindsDroppedSettings(t *testing.T) {
	t.Parallel()
	const asked = "&search_path=tenant_a&statement_timeout=5000&application_name=shop&no_such_thing=s3cr3t"
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, func(o *pgbouncer.Options) {
		o.Settings["ignore_startup_parameters"] = "search_path,statement_timeout,no_such_thing"
	})
	d := examine(t, "ignored_setting", exitFailed, r.URL+asked)
	if len(problems(d)) != 4 { // three settings, and that names are forwarded
		t.Errorf("%q", problems(d))
	}
	if said, err := json.Marshal(d); err != nil || strings.Contains(string(said), "s3cr3t") {
		t.Errorf("the value of a parameter that nobody knows: %s, %v", said, err)
	}
	code, stdout, _ := command(t.Context(), "doctor", r.DB.URL+"&search_path=tenant_a&statement_timeout=5000&application_name=shop")
	if code != exitOK || !strings.Contains(stdout, "as the connection string asks") {
		t.Errorf("the server itself: status %d\n%s", code, stdout)
	}
}

func TestDoctorWithASettingThatIsReported(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "18").Start(t, func(o *pgbouncer.Options) {
		o.Settings["ignore_startup_parameters"] = "search_path"
	})
	examine(t, "ignored_reported_setting", exitFailed, r.URL+"&search_path=tenant_a")
	r.Bouncer.Reload(t, map[string]string{"track_extra_parameters": "IntervalStyle, search_path"})
	r.Bouncer.Restart(t)
	code, stdout, _ := command(t.Context(), "doctor", r.URL+"&search_path=tenant_a")
	if code != exitOK || !strings.Contains(stdout, "search_path: as the connection string asks") {
		t.Errorf("after what the doctor advises: status %d\n%s", code, stdout)
	}
}

func TestDoctorWithARefusedSetting(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t)
	examine(t, "refused_setting", exitFailed, r.URL+"&search_path=tenant_a")
}

// A pooler whose server is down is told from a pooler that is down, and soon.
func TestDoctorWithoutTheServerBehindThePooler(t *testing.T) {
	t.Parallel()
	for _, version := range pgbouncer.Versions() {
		for _, test := range []struct {
			name    string
			warm    bool // PgBouncer has had a server before, and lets clients in
			console bool
		}{{"cold", false, true}, {"warm", true, true}, {"cold_no_console", false, false}} {
			t.Run(version+" "+test.name, func(t *testing.T) {
				t.Parallel()
				s := postgres.Start(t, postgres.Options{Dedicated: true})
				b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version})
				if test.warm {
					if _, _, stderr := command(t.Context(), "doctor", b.URL("postgres")); stderr != "" {
						t.Fatal(stderr)
					}
				}
				if !test.console {
					b.Reload(t, map[string]string{"admin_users": "somebody_else"})
				}
				s.Stop(t)
				start := time.Now()
				d := examine(t, "server_down_"+test.name, exitFailed, b.URL("postgres"))
				if took := time.Since(start); took > 15*time.Second {
					t.Errorf("it took %v", took)
				}
				if test.console && d.Server != nil {
					t.Errorf("%+v", d.Server)
				}
			})
		}
	}
}

// The other reason why a pooler gives no server. That it is not taken for a server that is down is the control of the test above.
func TestDoctorWithAllServersInUse(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionRaw, "1.18", "15").Start(t, func(o *pgbouncer.Options) { o.PoolSize = 1 })
	release, err := r.Bouncer.Pin(t.Context(), r.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	examine(t, "servers_in_use", exitFailed, "--timeout", "10s", r.URL)
}

func TestDoctorNamesTheHostThatAnswers(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "17").Start(t)
	answers, closed := hostOf(t, r.URL), closedPort(t)
	url := strings.Replace(r.URL, answers, closed+","+answers+","+closed, 1)
	d := examine(t, "second_host", exitOK, url)
	if d.Address == nil || *d.Address != answers || len(d.Hosts) != 3 || d.Hosts[2].Answers != nil {
		t.Errorf("%v, %+v", d.Address, d.Hosts)
	}
	d = examine(t, "no_host", exitFailed, strings.Replace(r.URL, answers, closed+","+closedPort(t), 1))
	if d.Address != nil {
		t.Errorf("an address of none: %s", *d.Address)
	}
}

// Whether a pooler tracks statements is not seen where its server does not say what is prepared.
func TestDoctorSaysWhatItHasNotSeen(t *testing.T) {
	t.Parallel()
	r := place.New(place.TransactionTracked, "1.24", "17").Start(t)
	if code, stdout, _ := command(t.Context(), "doctor", r.URL); code != exitOK || !strings.Contains(stdout, "keeps track of them") { // the control
		t.Fatal(stdout)
	}
	conn, err := pgconn.Connect(t.Context(), r.DB.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	hide := "set allow_system_table_mods = on; alter view pg_catalog.pg_prepared_statements rename to hidden"
	if _, err := conn.Exec(t.Context(), hide).ReadAll(); err != nil {
		t.Fatal(err)
	}
	if d := examine(t, "not_seen", exitOK, r.URL); d.Topology.Tracks != nil {
		t.Error(*d.Topology.Tracks)
	}
}

func TestDoctorTimeout(t *testing.T) {
	t.Parallel()
	r := place.New(place.Direct, "", "15").Start(t)
	if code, stdout, stderr := command(t.Context(), "doctor", "--timeout", "0", r.URL); code != exitOK {
		t.Errorf("0 is no limit: status %d\n%s%s", code, stdout, stderr)
	}
	if code, _, stderr := command(t.Context(), "doctor", "--timeout", "-1s", r.URL); code != exitFailed || !strings.Contains(stderr, "0 is no limit") {
		t.Errorf("status %d, %s", code, stderr)
	}
	// A listener that says nothing.
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	examine(t, "silent", exitFailed, "--timeout", "100ms", "postgres://app@"+l.Addr().String()+"/x?sslmode=disable")
}
