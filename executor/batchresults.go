package executor

import (
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/bounceproof/bounceproof/fallback"
)

// fail keeps the first error.
func (br *batchResults) fail(err error) {
	if br.err == nil {
		br.err = err
	}
}

// reader returns the next item's result.
func (br *batchResults) reader() (*pgconn.ResultReader, error) {
	if br.last != nil {
		br.last.Close()
		br.last = nil
	}
	switch {
	case br.err != nil:
		return nil, br.err
	case br.closed:
		return nil, errors.New("batch already closed")
	case br.next >= len(br.items):
		return nil, errors.New("no more results in batch")
	}
	rr := br.first
	br.first = nil
	if rr == nil {
		var err error
		if rr, err = br.g.Next(); err != nil {
			br.itemFailed(br.next, err)
			br.next++
			return nil, br.err
		}
	}
	br.next++
	return rr, nil
}

// itemFailed keeps the error of item i, after the selector and the catalog have heard of it.
func (br *batchResults) itemFailed(i int, err error) {
	a := br.items.at(i)
	if a == nil {
		a = &attempt{stage: stageSent}
	}
	a.runs = maxRuns
	phase := fallback.PhaseInside
	if br.t == nil && !br.control {
		phase = fallback.PhaseAlone
	}
	_, err = br.ex.decideRetry(br.ctx, br.s, a, phase, err)
	switch v := a.verdict; {
	case br.t != nil:
		err = br.t.fail(a, err)
	case !br.control && v.Executed == fallback.No && (isLost(v) || overtaken(v)):
		var lost *PreparedStatementError
		if !errors.As(err, &lost) {
			err = &PreparedStatementError{Reason: v.Reason, Name: v.Name, Err: err}
		}
	}
	br.fail(err)
}

// itemDone counts and traces the end of item i.
func (br *batchResults) itemDone(i int, start time.Time, tag pgconn.CommandTag, err error) {
	if err == nil {
		if a := br.items.at(i); a != nil {
			br.ex.succeeded(br.ctx, a)
		} else {
			br.ex.counters.passed.Add(1)
		}
	}
	if br.tracer != nil {
		item := br.b.QueuedQueries[i]
		br.tracer.TraceBatchQuery(br.ctx, br.s.c.Conn(), pgx.TraceBatchQueryData{
			SQL: item.SQL, Args: item.Arguments, CommandTag: tag, Err: err, ReadStartTime: start,
		})
	}
}

// Exec reads the next result as if the query had been sent with Exec.
func (br *batchResults) Exec() (pgconn.CommandTag, error) {
	br.delivered = true
	return br.exec()
}

func (br *batchResults) exec() (pgconn.CommandTag, error) {
	i, start := br.next, time.Now()
	rr, err := br.reader()
	var tag pgconn.CommandTag
	if err == nil {
		if tag, err = rr.Close(); err != nil {
			br.itemFailed(i, err)
			err = br.err
		}
	}
	if i < len(br.items) && br.next > i {
		br.itemDone(i, start, tag, err)
	}
	return tag, err
}

// Query reads the next result as if the query had been sent with Query.
func (br *batchResults) Query() (pgx.Rows, error) {
	r := br.query()
	return r, r.err
}

func (br *batchResults) query() *rows {
	br.delivered = true
	i, start := br.next, time.Now()
	rr, err := br.reader()
	r := &rows{conn: br.s.c.Conn()}
	if err != nil {
		r.fail(err)
		if i < len(br.items) && br.next > i {
			br.itemDone(i, start, r.tag, err)
		}
		return r
	}
	r.inner = pgx.RowsFromResultReader(br.s.c.TypeMap(), rr)
	if a := br.items.at(i); a != nil {
		if err := a.readable(br.s.c, br.items[i].q, rr.FieldDescriptions()); err != nil {
			br.fail(err)
			r.fail(err)
			br.itemDone(i, start, r.tag, err)
			return r
		}
	}
	br.last = r
	r.onClose = func(r *rows) {
		var pgErr *pgconn.PgError
		if r.err != nil && (errors.As(r.err, &pgErr) || br.s.c.PgConn().IsClosed()) {
			br.itemFailed(i, r.err)
			r.err = br.err
		}
		br.itemDone(i, start, r.tag, r.err)
	}
	return r
}

// QueryRow reads the next result as if the query had been sent with QueryRow.
func (br *batchResults) QueryRow() pgx.Row { return (*row)(br.query()) }

// Tx returns the transaction that Batch.BeginTx began, or nil.
func (br *batchResults) Tx() pgx.Tx {
	if !br.begins {
		return nil
	}
	return br.t
}

// Close reads what is left, runs the items' functions, and frees the connection. It returns the batch's first error; again the second time.
func (br *batchResults) Close() error {
	if br.closed {
		return br.err
	}
	if br.last != nil {
		br.last.Close()
		br.last = nil
	}
	returned := false
	defer func() {
		if !returned {
			br.release() // a function of an item's or the tracer panics
		}
	}()
	br.close()
	returned = true
	return br.err
}

func (br *batchResults) close() {
	br.drain()
	br.closed = true
	if br.g != nil {
		if err := br.g.Close(); err != nil && br.err == nil {
			br.itemFailed(len(br.items), err)
		}
	}
	br.ex.countMessages(br.s.c)
	if br.tracer != nil {
		br.tracer.TraceBatchEnd(br.ctx, br.s.c.Conn(), pgx.TraceBatchEndData{Err: br.err})
	}
	switch {
	case br.begins:
		br.t.sent(nil) // whatever the batch's error is: it may be one of the caller's functions
		if !br.t.preamble.begun {
			br.t.release() // it failed before it began
		}
	case br.t == nil:
		br.s.release()
	}
}

// release gives the connection back in the middle of a batch. The pool closes it if results are still to be read; within a transaction Rollback
// does.
func (br *batchResults) release() {
	br.closed = true
	br.fail(errors.New("batch ended by a panic"))
	switch {
	case br.begins:
		br.t.release()
	case br.t == nil:
		br.s.release()
	}
}

// drain reads what is left. While nothing has reached the caller, and no function would see it, a batch that lost a statement at any item
// is sent once more.
func (br *batchResults) drain() {
	silent := !br.delivered && br.t == nil && !br.control
	for i := br.next; silent && i < len(br.b.QueuedQueries); i++ {
		silent = br.b.QueuedQueries[i].Fn == nil
	}
	if silent && br.tracer == nil && br.err == nil && br.next < len(br.items) {
		br.silent = true
		if err := br.ex.run(br.ctx, br.s, br); err != nil {
			br.fail(err)
		}
	}
	for br.err == nil && br.next < len(br.items) {
		item := br.b.QueuedQueries[br.next]
		if item.Fn == nil {
			_, _ = br.exec()
			continue
		}
		br.delivered = true
		if err := item.Fn(br); err != nil {
			br.fail(err)
		}
	}
}

// readAll reads all results that are left.
func (br *batchResults) readAll() (*attempt, error) {
	for br.next < len(br.items) {
		rr := br.first
		br.first = nil
		var err error
		if rr == nil {
			rr, err = br.g.Next()
		}
		if err == nil {
			_, err = rr.Close()
		}
		if err != nil {
			return br.items.at(br.next), err
		}
		br.next++
	}
	return nil, nil
}
