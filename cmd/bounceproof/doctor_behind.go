package main

import (
	"context"
	"errors"
	"net"
	"strconv"

	"github.com/jackc/pgx/v5/pgconn"
)

// lookBehind asks PgBouncer's console, which answers without a server. A console that refuses us says that a pooler is there.
func lookBehind(ctx context.Context, cc *pgconn.Config) behind {
	b := behind{servers: unknownServers}
	ctx, cancel := context.WithTimeout(ctx, consolePatience)
	defer cancel()
	database := cc.Database
	if database == "" {
		database = cc.User
	}
	conn, err := console(ctx, cc)
	if err != nil {
		// PostgreSQL's own errors name a function of its source; a pooler's do not.
		pgErr, ok := errors.AsType[*pgconn.PgError](err)
		b.pooler = ok && pgErr.Routine == ""
		return b
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	b.pooler = true
	if rows := ask(ctx, conn, "show version"); len(rows) > 0 {
		for _, v := range rows[0] {
			b.version = v
		}
	}
	if pools := ask(ctx, conn, "show pools"); pools != nil {
		b.servers = noServers
		for _, pool := range pools {
			if pool["database"] != database {
				continue
			}
			for _, column := range []string{"sv_active", "sv_idle", "sv_used", "sv_tested", "sv_active_cancel", "sv_being_canceled"} {
				n, _ := strconv.Atoi(pool[column]) // older versions lack some
				b.servers += n
			}
		}
	}
	for _, db := range ask(ctx, conn, "show databases") {
		if db["name"] == database && db["host"] != "" {
			b.server = net.JoinHostPort(db["host"], db["port"])
		}
	}
	return b
}

// console connects to PgBouncer's console, which answers its administrators and those who may read its statistics.
func console(ctx context.Context, cc *pgconn.Config) (*pgconn.PgConn, error) {
	cc = cc.Copy()
	cc.Database, cc.RuntimeParams, cc.ValidateConnect, cc.AfterConnect = "pgbouncer", nil, nil, nil
	return pgconn.ConnectConfig(ctx, cc)
}

// ask returns the rows of a console's command by their columns' names, nil after an error.
func ask(ctx context.Context, conn *pgconn.PgConn, sql string) []map[string]string {
	results, err := conn.Exec(ctx, sql).ReadAll()
	if err != nil || len(results) == 0 {
		return nil
	}
	rows := []map[string]string{}
	for _, values := range results[0].Rows {
		row := make(map[string]string, len(values))
		for i, v := range values {
			row[results[0].FieldDescriptions[i].Name] = string(v)
		}
		rows = append(rows, row)
	}
	return rows
}

// failure is why there is no connection, and what to do.
type failure struct{ what, remedy string }
