package pgbouncer_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// Nobody gets into a server, a database through a pooler, or a pooler's console without the password of this run.
func TestServersAskForAPassword(t *testing.T) {
	t.Parallel()
	for i, version := range pgbouncer.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			s := postgres.Start(t, postgres.Options{Version: postgres.Versions()[i%len(postgres.Versions())]})
			b := pgbouncer.Start(t, s, pgbouncer.Options{Version: version})
			for name, url := range map[string]string{"server": s.URL("postgres"), "pooler": b.URL("postgres"), "console": b.URL("pgbouncer")} {
				config, err := pgx.ParseConfig(url)
				if err != nil {
					t.Fatal(err)
				}
				connect := func(password string) error {
					config.Password = password
					conn, err := pgconn.ConnectConfig(t.Context(), &config.Config)
					if err == nil {
						_ = conn.Close(t.Context())
					}
					return err
				}
				for _, wrong := range []string{"", "postgres", postgres.Password()[1:]} {
					err := connect(wrong)
					if refused, ok := errors.AsType[*pgconn.PgError](err); err == nil || ok && !strings.Contains(refused.Message, "password") && !strings.Contains(refused.Message, "auth") {
						t.Errorf("%s with the password %q: %v", name, wrong, err)
					}
				}
				if err := connect(postgres.Password()); err != nil { // the control
					t.Errorf("%s: %v", name, err)
				}
			}
			if len(postgres.Password()) < 26 {
				t.Errorf("a password of %d characters", len(postgres.Password()))
			}
		})
	}
}
