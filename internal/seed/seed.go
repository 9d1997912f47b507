//go:build seed

package seed

import (
	_ "github.com/google/go-cmp/cmp"
	_ "github.com/hashicorp/golang-lru/v2/simplelru"
	_ "github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/puddle/v2"
	_ "github.com/jedib0t/go-pretty/v6/table"
	_ "github.com/ory/dockertest/v3"
	_ "github.com/spf13/cobra"
	_ "go.uber.org/goleak"
	_ "golang.org/x/sync/errgroup"
	_ "pgregory.net/rapid"
	_ "golang.org/x/term"
)
