package executor_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/bounceproof/bounceproof/executor"
	"github.com/bounceproof/bounceproof/testenv/pgbouncer"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// A value whose length does not fit is refused by its length, and nothing of its row is there to be sent. The limit is a small one here: the real
// one takes a value of 1 GiB.
func TestCopyRefusesAValueThatIsTooLong(t *testing.T) {
	t.Parallel()
	if executor.MaxValue > math.MaxInt32 || executor.MaxValue < 1<<29 {
		t.Errorf("the limit is %d", executor.MaxValue)
	}
	fields := []pgconn.FieldDescription{{Name: "id", DataTypeOID: pgtype.Int4OID}, {Name: "v", DataTypeOID: pgtype.ByteaOID}}
	good := []any{int32(1), bytes.Repeat([]byte{'x'}, 10)}
	want, err := executor.CopyBytes(fields, 10, pgx.CopyFromRows([][]any{good})) // the control: as long as may be
	if err != nil {
		t.Fatal(err)
	}
	for name, value := range map[string]any{"binary": bytes.Repeat([]byte{'y'}, 11), "from text": `\x` + "7979797979797979797979"} {
		got, err := executor.CopyBytes(fields, 10, pgx.CopyFromRows([][]any{good, {int32(2), value}}))
		typed, ok := errors.AsType[*executor.ValueTooLongError](err)
		if !ok || typed.Column != "v" || typed.Length != 11 || typed.Limit != 10 {
			t.Errorf("%s: %v", name, err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s: %q would be sent, want the first row alone, %q", name, got, want)
		}
	}
}

// The whole way: the typed error, with the server's reachable, and nothing stored, on each kind of connection.
func TestCopyOfAValueThatIsTooLongStoresNothing(t *testing.T) {
	t.Parallel()
	server := postgres.Start(t, postgres.Options{Version: "15"})
	db := server.NewDatabase(t)
	for name, url := range map[string]string{
		"direct": db.URL, "pooled": pgbouncer.Start(t, server, pgbouncer.Options{Version: "1.18"}).URL(db.Name),
	} {
		cfg, err := pgxpool.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		ex, err := executor.NewPool(t.Context(), cfg, executor.Config{Logger: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ex.Close(context.Background()) })
		if _, err := ex.Exec(t.Context(), "drop table if exists long_values; create table long_values (id int, v bytea)", pgx.QueryExecModeSimpleProtocol); err != nil {
			t.Fatal(err)
		}
		send := func() error {
			_, err := ex.CopyFrom(t.Context(), pgx.Identifier{"long_values"}, []string{"id", "v"}, pgx.CopyFromRows([][]any{
				{int32(1), []byte("short")}, {int32(2), bytes.Repeat([]byte{'y'}, 100_000)},
			}))
			return err
		}
		count := func() (n int) {
			if err := ex.QueryRow(t.Context(), "select count(*) from long_values").Scan(&n); err != nil {
				t.Fatal(err)
			}
			return n
		}
		ex.LimitValues(99_999)
		err = send()
		if typed, ok := errors.AsType[*executor.ValueTooLongError](err); !ok || typed.Column != "v" || count() != 0 {
			t.Errorf("%s: %v, %d rows", name, err, count())
		}
		if _, ok := errors.AsType[*pgconn.PgError](err); !ok {
			t.Errorf("%s: %v has no error of the server's", name, err)
		}
		ex.LimitValues(100_000)
		if err := send(); err != nil || count() != 2 { // the control
			t.Errorf("%s: %v, %d rows", name, err, count())
		}
	}
}
