package postgres

// Configuration and DatabaseName are internal to the package.
var (
	Configuration = configuration
	DatabaseName  = databaseName
)
