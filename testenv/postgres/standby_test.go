package postgres_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/bounceproof/bounceproof/testenv/postgres"
)

func TestAStandbyFollowsAndIsPromoted(t *testing.T) {
	t.Parallel()
	for _, version := range postgres.Versions() {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			primary := postgres.Start(t, postgres.Options{Version: version, Dedicated: true})
			standby := primary.NewStandby(t, "", map[string]string{"work_mem": "7MB"})
			if got := show(t.Context(), t, standby.URL("postgres"), "work_mem"); got != "7MB" {
				t.Errorf("work_mem is %s", got)
			}
			run(t.Context(), t, primary.URL("postgres"), "create table kept (n int)", "insert into kept values (1)")
			primary.AwaitStreaming(t, standby)
			conn, err := pgx.Connect(t.Context(), standby.URL("postgres"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close(t.Context()) })
			var n int
			if err := conn.QueryRow(t.Context(), "select count(*) from kept").Scan(&n); err != nil || n != 1 {
				t.Fatalf("found %d rows, want 1 (%v)", n, err)
			}
			if _, err := conn.Exec(t.Context(), "insert into kept values (2)"); err == nil {
				t.Fatal("the standby takes writes")
			}
			standby.Promote(t)
			if _, err := conn.Exec(t.Context(), "insert into kept values (2)"); err != nil {
				t.Fatal(err)
			}
		})
	}
}
