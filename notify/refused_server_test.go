package notify_test

import (
	"strings"
	"testing"

	"github.com/bounceproof/bounceproof/internal/await"
	"github.com/bounceproof/bounceproof/notify"
	"github.com/bounceproof/bounceproof/testenv/postgres"
)

// A database of another encoding refuses what it lacks, and gets the rest. (Without client_encoding, which pgx does not set,
// such a server takes the bytes for its own encoding and refuses nothing.)
func TestDatabaseOfAnotherEncodingGetsAllItCanHold(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"15", "18"} {
		server := postgres.Start(t, postgres.Options{Version: version, Dedicated: true})
		for encoding, lacks := range map[string]bool{"LATIN1": true, "SQL_ASCII": false} {
			db := server.NewDatabase(t)
			name := "notify_" + strings.ToLower(encoding) // the server is this test's
			mustExec(t, mustConnect(t, db.URL), `create database `+name+` encoding '`+encoding+`' template template0 lc_collate 'C' lc_ctype 'C'`)
			pool := newPool(t, server.URL(name)+"&client_encoding=UTF8")
			l := listen(t, pool, steady)
			l.await(t, notify.Proven)
			s := newSender(t, pool, notify.SenderConfig{})
			notifyAll(t, s, "news", "1", "é", "☃")
			notifyAll(t, s, "☃", "x")
			notifyAll(t, s, "news", "2", "")
			if err := s.Flush(t.Context()); err != nil && !lacks {
				t.Fatal(err)
			}
			want := []string{"1", "é", "2", ""}
			if !lacks {
				want = append(want, "☃")
			}
			for _, payload := range want {
				await.True(t, encoding+": payload "+payload, func() bool { return l.heard(payload) })
			}
			st := s.Stats()
			if refused := st.Dropped != 0 || st.Collapsed != 0; refused != lacks || l.heard("☃") == lacks || st.Pending != 0 {
				t.Errorf("%s: stats %+v", encoding, st)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
			l.stop()
		}
	}
}
